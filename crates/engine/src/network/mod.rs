//! Holding the network still.

pub mod rules;
