//! Constants of libc in the width in which the kernel's messages and structures have them: for libc most are an `int`.
//! Constants are made of them: there the compiler does the work, and refuses a number that does not fit.

/// A number in 8 bits.
///
/// # Panics
/// If it has more: a constant of it does not compile.
#[must_use]
pub const fn byte(number: libc::c_int) -> u8 {
    let [byte, rest @ ..] = number.to_le_bytes();
    assert!(matches!(rest, [0, 0, 0]), "the number has more than 8 bits");
    byte
}

/// A number in 32 bits, of those that are an `unsigned long`.
///
/// # Panics
/// If it has more: a constant of it does not compile.
#[must_use]
pub const fn word(number: libc::c_ulong) -> u32 {
    let [a, b, c, d, rest @ ..] = number.to_le_bytes();
    assert!(matches!(rest, [0, 0, 0, 0]), "the number has more than 32 bits");
    u32::from_le_bytes([a, b, c, d])
}

/// A number in 16 bits.
///
/// # Panics
/// If it has more: a constant of it does not compile.
#[must_use]
pub const fn short(number: libc::c_int) -> u16 {
    let [low, high, rest @ ..] = number.to_le_bytes();
    assert!(matches!(rest, [0, 0]), "the number has more than 16 bits");
    u16::from_le_bytes([low, high])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_is_kept() {
        assert_eq!([byte(0), byte(libc::AF_INET6), byte(255)], [0, 10, 255]);
        assert_eq!([short(0), short(libc::NLM_F_DUMP), short(0xffff)], [0, 0x300, 0xffff]);
        assert_eq!([word(0), word(libc::MS_PRIVATE), word(0xffff_ffff)], [0, 1 << 18, u32::MAX]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for number in [256, -1, i32::MIN] {
            assert!(std::panic::catch_unwind(|| byte(number)).is_err(), "{number}");
        }
        for number in [0x1_0000, -1, i32::MIN] {
            assert!(std::panic::catch_unwind(|| short(number)).is_err(), "{number}");
        }
        for number in [1 << 32, u64::MAX] {
            assert!(std::panic::catch_unwind(|| word(number)).is_err(), "{number}");
        }
    }
}
