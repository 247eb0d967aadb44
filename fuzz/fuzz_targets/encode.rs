//! See `torpor_fuzz::encode`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::encode(data));
