"""Tables larger than the device: what lies below it, measured."""
