"""The operations of the jagged types and ops that are compared with the peers', each called on both sides."""
