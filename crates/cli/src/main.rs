//! The `torpor` program.
fn main() {}
