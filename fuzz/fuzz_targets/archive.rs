//! See `torpor_fuzz::archive`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::archive(data));
