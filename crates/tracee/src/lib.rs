//! Stopped tasks.
