//! See `torpor_fuzz::texts`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::texts(data));
