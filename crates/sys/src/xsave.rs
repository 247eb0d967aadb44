//! The extended state of the processor (x87, SSE, AVX …) as XSAVE lays it out in its
//! standard format: a legacy area, a header that says which components are not in their
//! initial state, and the components, at offsets that the processor gives.

use std::arch::x86_64::__cpuid_count;
use std::sync::LazyLock;

/// Size of the legacy area, and of the header behind it.
pub const LEGACY: usize = 512;
/// Size of the header.
pub const HEADER: usize = 64;

/// Size and offset of a component (CPUID leaf 0xD); 0 if this processor has none.
#[must_use]
pub fn component(number: u32) -> (usize, usize) {
    /// Asked for once: in a virtual machine the host answers, which takes its time.
    static LAYOUT: LazyLock<[(usize, usize); 64]> = LazyLock::new(|| {
        std::array::from_fn(|number| {
            let leaf = __cpuid_count(0xd, u32::try_from(number).unwrap_or(u32::MAX));
            (usize::try_from(leaf.eax).unwrap_or(0), usize::try_from(leaf.ebx).unwrap_or(0))
        })
    });
    usize::try_from(number).ok().and_then(|n| LAYOUT.get(n).copied()).unwrap_or_default()
}

/// How many bytes of an image there are up to the end of the last component in use.
#[must_use]
pub fn len_in_use(state: &[u8]) -> usize {
    let Some(header) = state.get(LEGACY..LEGACY + 8) else { return state.len() };
    let in_use = header.iter().rev().fold(0u64, |bits, &byte| bits << 8 | u64::from(byte));
    let end = |number: u32| {
        let (size, offset) = component(number);
        size + offset
    };
    // The first two components are the legacy area.
    let ends = (2..64).filter(|number| in_use >> number & 1 != 0).map(end);
    ends.max().unwrap_or(0).max(LEGACY + HEADER).min(state.len())
}

/// How many bytes of an image there are without the tiles of AMX, which are three quarters of
/// it, where they are not in use.
#[must_use]
pub fn len_without_tiles(state: &[u8]) -> usize {
    /// The first of their two components.
    const TILE_CONFIGURATION: u32 = 17;
    match component(TILE_CONFIGURATION) {
        (0, _) => state.len(),
        (_, offset) => len_in_use(state).max(offset).min(state.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_ends_with_its_last_component_in_use() {
        let mut state = vec![0u8; 16384];
        assert_eq!(len_in_use(&state), LEGACY + HEADER);
        state[LEGACY] = 0b11;
        assert_eq!(len_in_use(&state), LEGACY + HEADER);
        let (size, offset) = component(2);
        if size != 0 {
            state[LEGACY] = 0b111;
            assert_eq!(len_in_use(&state), offset + size);
        }
        assert_eq!(len_in_use(&state[..100]), 100);
    }

    #[test]
    fn tiles_in_use_stay() {
        let mut state = vec![0u8; 16384];
        let (size, offset) = component(18);
        assert_eq!(len_without_tiles(&state) < 16384, size != 0);
        if size != 0 {
            state[LEGACY + 2] = 0b100;
            assert_eq!(len_without_tiles(&state), offset + size);
        }
        assert_eq!(len_without_tiles(&state[..100]), 100);
    }
}
