"""Ranges that keys of several sections share; each is a check of a value, and what it must be in words."""

import math

from dtrain.base.ranges import Range, is_number

AUTO: Range = (lambda v: v in ("auto", True, False), "auto, true or false")
COUNT: Range = (lambda v: v == "auto" or (type(v) is int and v >= 1), "a whole number, at least 1, or auto")
DIVISOR: Range = (lambda v: is_number(v) and v > 0, "a finite number, more than 0, 1e-10 to 1e10")
SHARE: Range = (lambda v: 0 <= v <= 1, "from 0 to 1")
SIZE: Range = (lambda v: 0 <= v < math.inf, "a finite number, at least 0")
STOP: Range = (all, "texts that are not empty")
TIME: Range = (lambda v: 0 < v < math.inf, "a finite number, more than 0")
TOP_K: Range = (lambda v: 1 <= v < 2**31, "at least 1, below 2**31, or null for all")
UP_TO_1: Range = (lambda v: 0 < v <= 1, "more than 0, up to 1")
WEIGHT: Range = (lambda v: is_number(v) and v >= 0, "a finite number, at least 0, up to 1e10")
