//! See `torpor_fuzz::plan::plan`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::plan::plan(data));
