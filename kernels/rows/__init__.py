"""Where rows lie that do not all fit the device: moves between slots and records, victims, first values, recency."""
