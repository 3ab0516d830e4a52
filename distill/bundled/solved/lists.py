"""Solved small tasks on lists and matrices."""

from __future__ import annotations

import statistics
from itertools import pairwise


def common_elements(first: list[int], second: list[int]) -> list[int]:
    """Returns the sorted distinct elements that two lists share."""
    return sorted(set(first) & set(second))


def only_in_first(first: list[int], second: list[int]) -> list[int]:
    """Returns the elements of the first list that do not occur in the second."""
    return [x for x in first if x not in second]


def merge_sorted(first: list[int], second: list[int]) -> list[int]:
    """Merges two lists into one sorted list."""
    return sorted(first + second)


def interleave(first: list[int], second: list[int]) -> list[int]:
    """Takes elements from two lists in turn until the shorter one is used up."""
    return [x for pair in zip(first, second) for x in pair]


def elementwise_sum(first: list[int], second: list[int]) -> list[int]:
    """Adds two lists element by element."""
    return [a + b for a, b in zip(first, second)]


def elementwise_max(first: list[int], second: list[int]) -> list[int]:
    """Returns the larger element at each position of two lists."""
    return [max(a, b) for a, b in zip(first, second)]


def dot_product(first: list[int], second: list[int]) -> int:
    """Computes the dot product of two lists of numbers."""
    return sum(a * b for a, b in zip(first, second))


def distances(first: list[int], second: list[int]) -> list[int]:
    """Returns the absolute differences between the elements of two lists at the same position."""
    return [abs(a - b) for a, b in zip(first, second)]


def same_elements(first: list[int], second: list[int]) -> bool:
    """Checks whether two lists hold the same elements, in whatever order."""
    return sorted(first) == sorted(second)


def rotate_left(numbers: list[int], k: int) -> list[int]:
    """Rotates a list to the left by k positions."""
    k %= len(numbers)
    return numbers[k:] + numbers[:k]


def rotate_right(numbers: list[int], k: int) -> list[int]:
    """Rotates a list to the right by k positions."""
    k %= len(numbers)
    return numbers[-k:] + numbers[:-k]


def chunks(numbers: list[int], k: int) -> list[list[int]]:
    """Splits a list into pieces of length k; the last one may be shorter."""
    return [numbers[i : i + k] for i in range(0, len(numbers), k)]


def every_kth(numbers: list[int], k: int) -> list[int]:
    """Returns every k-th element of a list, starting with the first."""
    return numbers[::k]


def kth_largest(numbers: list[int], k: int) -> int:
    """Returns the k-th largest element of a list."""
    return sorted(numbers, reverse=True)[k - 1]


def kth_smallest(numbers: list[int], k: int) -> int:
    """Returns the k-th smallest element of a list."""
    return sorted(numbers)[k - 1]


def top_k(numbers: list[int], k: int) -> list[int]:
    """Returns the k largest elements of a list in descending order."""
    return sorted(numbers, reverse=True)[:k]


def running_total(numbers: list[int]) -> list[int]:
    """Returns the running totals of a list of numbers."""
    totals, total = [], 0
    for x in numbers:
        total += x
        totals.append(total)
    return totals


def running_maximum(numbers: list[int]) -> list[int]:
    """Returns, for each position of a list, the largest element seen so far."""
    best, result = numbers[0], []
    for x in numbers:
        best = max(best, x)
        result.append(best)
    return result


def differences(numbers: list[int]) -> list[int]:
    """Returns the differences between neighbouring elements of a list."""
    return [b - a for a, b in pairwise(numbers)]


def is_increasing(numbers: list[int]) -> bool:
    """Checks whether each element of a list is larger than the one before it."""
    return all(a < b for a, b in pairwise(numbers))


def count_peaks(numbers: list[int]) -> int:
    """Counts the elements of a list that are larger than both neighbours."""
    return sum(1 for a, b, c in zip(numbers, numbers[1:], numbers[2:]) if a < b > c)


def second_largest(numbers: list[int]) -> int:
    """Returns the second largest distinct element of a list."""
    return sorted(set(numbers))[-2]


def value_range(numbers: list[int]) -> int:
    """Returns the difference between the largest and the smallest element of a list."""
    return max(numbers) - min(numbers)


def median(numbers: list[float]) -> float:
    """Returns the median of a list of numbers."""
    return float(statistics.median(numbers))


def mean_deviation(numbers: list[float]) -> float:
    """Returns the mean absolute deviation of a list of numbers from their mean."""
    mean = sum(numbers) / len(numbers)
    return sum(abs(x - mean) for x in numbers) / len(numbers)


def closest_to_zero(numbers: list[int]) -> int:
    """Returns the element of a list that is closest to zero."""
    return min(numbers, key=abs)


def pairs_with_sum(numbers: list[int], k: int) -> int:
    """Counts the pairs of positions in a list whose elements add up to a target."""
    count = 0
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            if numbers[i] + numbers[j] == k:
                count += 1
    return count


def largest_pair_product(numbers: list[int]) -> int:
    """Returns the largest product of two elements at different positions of a list."""
    return max(a * b for i, a in enumerate(numbers) for b in numbers[i + 1 :])


def largest_window(numbers: list[int], k: int) -> int:
    """Returns the largest sum of k neighbouring elements of a list."""
    return max(sum(numbers[i : i + k]) for i in range(len(numbers) - k + 1))


def longest_run(numbers: list[int]) -> int:
    """Returns the length of the longest run of increasing neighbours in a list."""
    best = length = 1
    for a, b in pairwise(numbers):
        length = length + 1 if b > a else 1
        best = max(best, length)
    return best


def maximum_subarray(numbers: list[int]) -> int:
    """Returns the largest sum of a non-empty block of neighbouring elements."""
    best = current = numbers[0]
    for x in numbers[1:]:
        current = max(x, current + x)
        best = max(best, current)
    return best


def move_zeros(numbers: list[int]) -> list[int]:
    """Moves all zeros of a list to its end and keeps the order of the other elements."""
    return [x for x in numbers if x] + [0] * numbers.count(0)


def swap_ends(numbers: list[int]) -> list[int]:
    """Swaps the first and the last element of a list."""
    return [numbers[-1], *numbers[1:-1], numbers[0]]


def alternate_signs(numbers: list[int]) -> list[int]:
    """Makes the elements of a list alternately positive and negative, starting positive."""
    return [abs(x) if i % 2 == 0 else -abs(x) for i, x in enumerate(numbers)]


def even_before_odd(numbers: list[int]) -> list[int]:
    """Puts the even numbers of a list before the odd ones, keeping their order."""
    return [x for x in numbers if x % 2 == 0] + [x for x in numbers if x % 2]


def index_of_maximum(numbers: list[int]) -> int:
    """Returns the position of the first occurrence of the largest element."""
    return numbers.index(max(numbers))


def clip(numbers: list[int], k: int, high: int) -> list[int]:
    """Limits every number of a list to the range from low to high."""
    return [min(max(x, k), high) for x in numbers]


def row_sums(matrix: list[list[int]]) -> list[int]:
    """Returns the sum of each row of a matrix."""
    return [sum(row) for row in matrix]


def column_sums(matrix: list[list[int]]) -> list[int]:
    """Returns the sum of each column of a matrix."""
    return [sum(column) for column in zip(*matrix)]


def transpose(matrix: list[list[int]]) -> list[list[int]]:
    """Transposes a matrix."""
    return [list(column) for column in zip(*matrix)]


def trace(matrix: list[list[int]]) -> int:
    """Returns the sum of the main diagonal of a square matrix."""
    return sum(matrix[i][i] for i in range(len(matrix)))


def diagonal_difference(matrix: list[list[int]]) -> int:
    """Returns the absolute difference between the sums of the two diagonals of a square matrix."""
    size = len(matrix)
    return abs(sum(matrix[i][i] - matrix[i][size - 1 - i] for i in range(size)))


def flatten(matrix: list[list[int]]) -> list[int]:
    """Flattens a matrix into one list, row by row."""
    return [x for row in matrix for x in row]


def row_maxima(matrix: list[list[int]]) -> list[int]:
    """Returns the largest element of each row of a matrix."""
    return [max(row) for row in matrix]


def is_symmetric(matrix: list[list[int]]) -> bool:
    """Checks whether a square matrix equals its transpose."""
    return matrix == [list(column) for column in zip(*matrix)]


def rotate_matrix(matrix: list[list[int]]) -> list[list[int]]:
    """Rotates a square matrix clockwise by 90 degrees."""
    return [list(column) for column in zip(*matrix[::-1])]


def scale_matrix(matrix: list[list[int]], k: int) -> list[list[int]]:
    """Multiplies every element of a matrix by a factor."""
    return [[k * x for x in row] for row in matrix]


def matrix_maximum(matrix: list[list[int]]) -> int:
    """Returns the largest element of a matrix."""
    return max(x for row in matrix for x in row)


def count_in_matrix(matrix: list[list[int]], k: int) -> int:
    """Counts how often a number occurs in a matrix."""
    return sum(row.count(k) for row in matrix)
