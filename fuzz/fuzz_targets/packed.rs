//! See `torpor_fuzz::packed`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::packed(data));
