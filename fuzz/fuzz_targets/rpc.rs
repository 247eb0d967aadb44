//! See `torpor_fuzz::rpc`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| torpor_fuzz::rpc(data));
