//! The step as a program: instructions, lanes, dependencies, lowerings, checker. Plain data.
