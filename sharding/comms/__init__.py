"""What ranks say to each other: process groups, collectives, codecs, agreement, and failures."""
