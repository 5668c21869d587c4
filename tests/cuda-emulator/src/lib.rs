//! Interprets PTX on the CPU.
