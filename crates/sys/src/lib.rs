//! Kernel interfaces.
