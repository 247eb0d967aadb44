//! See `torpor_fuzz::seal`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::seal(data));
