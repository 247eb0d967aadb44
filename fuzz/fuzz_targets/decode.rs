//! See `torpor_fuzz::decode`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::decode(data));
