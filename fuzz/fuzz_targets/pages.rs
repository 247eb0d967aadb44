//! See `torpor_fuzz::pages`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::pages(data));
