"""Numbers that the torch path and the loops of residency.py share."""

# what `slot_of` has for rows without a slot: their record lies below, or they never left their initial values
BELOW, FRESH = -1, -2
# keys of slots: 0 of an empty one, then scores, then next uses
EMPTY_KEYS, SCORES, NEXT_USES = 1, 2**30 - 2, 2**31 - 1
# policies that loops know; 0 is any other
LRU, LFU, AGED_LFU = 1, 2, 3
# of a binary logarithm: parts of one
UNIT = 1024
# a slot that the batch under way found has so many holders more, a missing row so much less in `slot_of`
MARK, MARKED = 1 << 30, -2
# of a queue of victims, int64: its table's slots [LOW, HIGH), entries (key << 32) + slot in order from HEAD to END at
# an address, a heap of others at an address, and the highest entry it knows of: all free slots up to there are in it
LOW, HIGH, LIMIT, ENTRIES, HEAD, END, HEAP, HEAP_SIZE, HEAP_ROOM, FIELDS_OF_QUEUE = range(10)
