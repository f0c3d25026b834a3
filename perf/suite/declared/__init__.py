"""The bytes that each kernel declares, as functions of a call."""
