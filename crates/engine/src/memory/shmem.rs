//! Shared anonymous memory: saved once, however many tasks map it.
