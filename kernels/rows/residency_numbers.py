"""Numbers that the torch path and the loops of residency.py share."""

BELOW = -1
"""What `slot_of` has for a row without a slot whose record lies below."""
FRESH = -2
"""The same for a row that never left its initial values."""
# keys of slots: 0 of an empty one, then scores, then next uses
EMPTY_KEYS = 1
"""Keys below this are of empty slots: 0 alone."""
SCORES = 2**30 - 2
"""The largest score that a key has; its key is this and EMPTY_KEYS."""
NEXT_USES = 2**31 - 1
"""The largest key; of a row that a batch to come uses, this less the number of that batch."""
# 0 is any other
LRU = 1
"""The policy by the last use, as loops know it."""
LFU = 2
"""The policy by the number of uses."""
AGED_LFU = 3
"""The policy by the number of uses, of which old ones count less."""
UNIT = 1024
"""Parts of one, of a binary logarithm."""
# a slot that the batch under way found has so many holders more, a missing row so much less in `slot_of`
MARK, MARKED = 1 << 30, -2
# of a queue of victims, int64: its table's slots [LOW, HIGH), entries (key << 32) + slot in order from HEAD to END at
# an address, a heap of others at an address, and the highest entry it knows of: all free slots up to there are in it
LOW, HIGH, LIMIT, ENTRIES, HEAD, END, HEAP, HEAP_SIZE, HEAP_ROOM, FIELDS_OF_QUEUE = range(10)
