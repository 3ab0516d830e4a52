"""Solved small tasks on strings and words."""

from __future__ import annotations


def reverse_string(text: str) -> str:
    """Reverses a string."""
    return text[::-1]


def is_palindrome(text: str) -> bool:
    """Checks whether a string is a palindrome, ignoring spaces and case."""
    letters = [c.lower() for c in text if c != " "]
    return letters == letters[::-1]


def are_anagrams(first: str, second: str) -> bool:
    """Checks whether two words are anagrams of each other."""
    return sorted(first.lower()) == sorted(second.lower())


def common_prefix(first: str, second: str) -> str:
    """Returns the longest common prefix of two words."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return first[:length]


def count_letter(text: str, letter: str) -> int:
    """Counts how often a letter occurs in a string, ignoring case."""
    return text.lower().count(letter)


def remove_letter(text: str, letter: str) -> str:
    """Removes every occurrence of a letter from a string."""
    return text.replace(letter, "")


def first_repeated(text: str) -> str:
    """Returns the first character that occurs twice in a string, or an empty string."""
    seen = set()
    for c in text:
        if c in seen:
            return c
        seen.add(c)
    return ""


def first_unique(text: str) -> str:
    """Returns the first character that occurs only once in a string, or an empty string."""
    return next((c for c in text if text.count(c) == 1), "")


def most_common_letter(text: str) -> str:
    """Returns the letter that occurs most often in a string; the first one on a tie."""
    letters = [c for c in text if c.isalpha()]
    return max(letters, key=letters.count)


def unique_characters(word: str) -> bool:
    """Checks whether no character of a word occurs twice."""
    return len(set(word)) == len(word)


def remove_repeats(text: str) -> str:
    """Removes repeated characters from a string and keeps the first of each."""
    return "".join(dict.fromkeys(text))


def run_length(word: str) -> str:
    """Compresses a string by writing each run of a character as the character and its count."""
    result, i = "", 0
    while i < len(word):
        j = i
        while j < len(word) and word[j] == word[i]:
            j += 1
        result += word[i] + str(j - i)
        i = j
    return result


def caesar(text: str, k: int) -> str:
    """Shifts every lower-case letter of a string by k places in the alphabet, from z on to a."""
    return "".join(chr((ord(c) - 97 + k) % 26 + 97) if c.islower() else c for c in text)


def swap_case(text: str) -> str:
    """Turns capital letters into small ones and small ones into capitals."""
    return text.swapcase()


def title_case(text: str) -> str:
    """Capitalises the first letter of every word."""
    return " ".join(w[:1].upper() + w[1:] for w in text.split())


def snake_to_camel(text: str) -> str:
    """Joins the words of a sentence in camel case."""
    first, *rest = text.lower().split()
    return first + "".join(w.capitalize() for w in rest)


def words_to_snake(text: str) -> str:
    """Joins the words of a sentence with underscores, in lower case."""
    return "_".join(text.lower().split())


def initials(text: str) -> str:
    """Returns the initials of the words in a sentence, in capitals."""
    return "".join(w[0].upper() for w in text.split())


def longest_word(text: str) -> str:
    """Returns the longest word of a sentence; the first one on a tie."""
    return max(text.split(), key=len)


def shortest_word(text: str) -> str:
    """Returns the shortest word of a sentence; the first one on a tie."""
    return min(text.split(), key=len)


def average_word_length(text: str) -> float:
    """Returns the average length of the words in a sentence."""
    words = text.split()
    return sum(len(w) for w in words) / len(words)


def reverse_words(text: str) -> str:
    """Reverses the order of the words in a sentence."""
    return " ".join(text.split()[::-1])


def sort_words(text: str) -> str:
    """Sorts the words of a sentence alphabetically, ignoring case."""
    return " ".join(sorted(text.split(), key=str.lower))


def sort_by_length(words: list[str]) -> list[str]:
    """Sorts a list of words by their length and keeps the order of equally long ones."""
    return sorted(words, key=len)


def longest_in_list(words: list[str]) -> str:
    """Returns the longest string of a list; the first one on a tie."""
    return max(words, key=len)


def total_length(words: list[str]) -> int:
    """Returns the total number of characters in a list of strings."""
    return sum(len(w) for w in words)


def join_with(words: list[str], separator: str) -> str:
    """Joins a list of strings with a separator."""
    return separator.join(words)


def starting_with(words: list[str], letter: str) -> list[str]:
    """Returns the strings of a list that start with a given letter."""
    return [w for w in words if w.startswith(letter)]


def containing(words: list[str], letter: str) -> list[str]:
    """Returns the strings of a list that contain a given letter."""
    return [w for w in words if letter in w]


def word_lengths(words: list[str]) -> list[int]:
    """Returns the length of each string in a list."""
    return [len(w) for w in words]


def truncate(text: str, width: int) -> str:
    """Cuts a string to its first width characters and adds three dots when something was cut."""
    return text if len(text) <= width else text[:width] + "..."


def repeat_word(word: str, n: int) -> str:
    """Repeats a word n times, separated by hyphens."""
    return "-".join([word] * n)


def is_subsequence(first: str, second: str) -> bool:
    """Checks whether the letters of the first word occur in the second in the same order."""
    letters = iter(second)
    return all(c in letters for c in first)


def hamming_distance(first: str, second: str) -> int:
    """Counts the positions at which two words differ, up to the shorter one's length."""
    return sum(1 for a, b in zip(first, second) if a != b)


def balanced(text: str) -> bool:
    """Checks whether the numbers of small and capital letters in a string are equal."""
    return sum(c.islower() for c in text) == sum(c.isupper() for c in text)
