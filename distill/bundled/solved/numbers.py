"""Solved small tasks on numbers and arithmetic."""

from __future__ import annotations

import math


def digit_sum(number: int) -> int:
    """Returns the sum of the decimal digits of a number."""
    return sum(int(d) for d in str(number))


def digit_product(number: int) -> int:
    """Returns the product of the decimal digits of a number."""
    return math.prod(int(d) for d in str(number))


def digital_root(number: int) -> int:
    """Adds up the digits of a number again and again until one digit is left."""
    while number > 9:
        number = sum(int(d) for d in str(number))
    return number


def backwards(number: int) -> int:
    """Reverses the decimal digits of a number."""
    return int(str(number)[::-1])


def is_palindrome_number(number: int) -> bool:
    """Checks whether a number reads the same in both directions."""
    return str(number) == str(number)[::-1]


def count_divisors(number: int) -> int:
    """Counts the positive divisors of a number."""
    return sum(1 for d in range(1, number + 1) if number % d == 0)


def divisors(number: int) -> list[int]:
    """Returns all positive divisors of a number in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def prime_factors(number: int) -> list[int]:
    """Returns the prime factors of a number in ascending order, repeated ones included."""
    factors, d = [], 2
    while number > 1:
        while number % d == 0:
            factors.append(d)
            number //= d
        d += 1
    return factors


def largest_prime_factor(number: int) -> int:
    """Returns the largest prime factor of a number greater than 1."""
    d = 2
    while d * d <= number:
        if number % d == 0:
            number //= d
        else:
            d += 1
    return number


def is_prime(number: int) -> bool:
    """Checks whether a number is prime."""
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


def primes_below(limit: int) -> list[int]:
    """Returns all prime numbers below a limit."""
    return [n for n in range(2, min(limit, 60)) if all(n % d for d in range(2, int(n**0.5) + 1))]


def next_prime(number: int) -> int:
    """Returns the smallest prime number greater than the given one."""
    n = number + 1
    while not all(n % d for d in range(2, int(n**0.5) + 1)):
        n += 1
    return n


def greatest_common_divisor(a: int, b: int) -> int:
    """Computes the greatest common divisor of two positive numbers."""
    while b:
        a, b = b, a % b
    return a


def least_common_multiple(a: int, b: int) -> int:
    """Computes the least common multiple of two positive numbers."""
    return a * b // math.gcd(a, b)


def are_coprime(a: int, b: int) -> bool:
    """Checks whether two numbers have no common divisor other than 1."""
    return math.gcd(a, b) == 1


def factorial(n: int) -> int:
    """Computes the factorial of a non-negative number."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


def fibonacci(n: int) -> int:
    """Returns the n-th Fibonacci number, where the first two are 0 and 1."""
    a, b = 0, 1
    for _ in range(n - 1):
        a, b = b, a + b
    return a


def fibonacci_list(n: int) -> list[int]:
    """Returns the first n Fibonacci numbers, starting with 0 and 1."""
    values = [0, 1]
    while len(values) < n:
        values.append(values[-1] + values[-2])
    return values[:n]


def triangular_number(n: int) -> int:
    """Returns the n-th triangular number."""
    return n * (n + 1) // 2


def power_of_two(number: int) -> bool:
    """Checks whether a number is a power of two."""
    return number > 0 and number & (number - 1) == 0


def count_set_bits(number: int) -> int:
    """Counts the ones in the binary form of a number."""
    return bin(number).count("1")


def to_binary(number: int) -> str:
    """Converts a non-negative number to a string of binary digits."""
    return bin(number)[2:]


def to_base(number: int, width: int) -> str:
    """Converts a number to a string of digits in the base width + 1."""
    base, digits = width + 1, ""
    while number:
        digits = str(number % base) + digits
        number //= base
    return digits or "0"


def to_roman(number: int) -> str:
    """Converts a number to a Roman numeral."""
    result = ""
    for value, letters in (
        (1000, "M"),
        (900, "CM"),
        (500, "D"),
        (400, "CD"),
        (100, "C"),
        (90, "XC"),
        (50, "L"),
        (40, "XL"),
        (10, "X"),
        (9, "IX"),
        (5, "V"),
        (4, "IV"),
        (1, "I"),
    ):
        while number >= value:
            result += letters
            number -= value
    return result


def collatz_steps(number: int) -> int:
    """Counts the steps of the Collatz rule that lead from a number to 1."""
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def is_perfect_square(number: int) -> bool:
    """Checks whether a number is the square of an integer."""
    return math.isqrt(number) ** 2 == number


def sum_of_multiples(limit: int) -> int:
    """Adds up all numbers below a limit that are divisible by 3 or 5."""
    return sum(n for n in range(limit) if n % 3 == 0 or n % 5 == 0)


def leap_year(year: int) -> bool:
    """Checks whether a year is a leap year."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def seconds_to_clock(seconds: int) -> str:
    """Formats a number of seconds as hours, minutes and seconds, such as 1:02:03."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def celsius_to_fahrenheit(degrees: float) -> float:
    """Converts degrees Celsius to degrees Fahrenheit."""
    return degrees * 9 / 5 + 32


def compound_interest(amount: float, rate: float, n: int) -> float:
    """Returns the value of an amount after n years at the given yearly rate in percent, rounded to two decimals."""
    return round(amount * (1 + rate / 100) ** n, 2)


def discounted_price(price: float, discount: float) -> float:
    """Returns a price after a discount in percent, rounded to two decimals."""
    return round(price * (1 - discount / 100), 2)


def triangle_area(base: float, height: float) -> float:
    """Computes the area of a triangle from its base and height."""
    return base * height / 2


def circle_area(radius: float) -> float:
    """Computes the area of a circle from its radius, rounded to two decimals."""
    return round(math.pi * radius * radius, 2)


def hypotenuse(a: float, b: float) -> float:
    """Computes the length of the hypotenuse of a right triangle, rounded to two decimals."""
    return round(math.hypot(a, b), 2)


def is_valid_triangle(a: int, b: int, c: int) -> bool:
    """Checks whether three lengths can form a triangle."""
    return a + b > c and a + c > b and b + c > a


def middle_of_three(a: int, b: int, c: int) -> int:
    """Returns the middle one of three numbers."""
    return sorted((a, b, c))[1]
