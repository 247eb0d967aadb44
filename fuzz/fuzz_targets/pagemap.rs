//! See `torpor_fuzz::pagemap`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::pagemap(data));
