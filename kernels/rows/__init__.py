"""Where rows lie and when they were last wanted: moves between records and slots, victims, first values, recency."""
