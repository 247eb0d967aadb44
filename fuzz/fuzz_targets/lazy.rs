//! See `torpor_fuzz::lazy`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::lazy(data));
