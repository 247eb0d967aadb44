//! See `torpor_fuzz::payloads`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::payloads(data));
