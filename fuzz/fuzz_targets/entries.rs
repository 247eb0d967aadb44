//! See `torpor_fuzz::entries`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::entries(data));
