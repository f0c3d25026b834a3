from .beside import Case
CASES: list[Case] = []
