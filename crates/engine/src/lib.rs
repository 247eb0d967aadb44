//! Dump and restore.
