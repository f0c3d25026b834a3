"""FBGEMM's ops and modules of tables as we serve them beside its own."""
