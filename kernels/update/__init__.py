"""The backward of a lookup fused with its optimizer: rules, the transposed index, the kernel."""
