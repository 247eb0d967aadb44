//! What a filter can return for a system call, whatever its arguments are: both branches of each test count that is not
//! of the number or the convention alone.

use std::collections::HashSet;

use super::filter::INSTRUCTION;

/// The actions after which a system call goes on, or may: it is allowed, written to
/// the log, or asked for of a tracer or a supervisor.
const GO_ON: [u32; 4] = [
    libc::SECCOMP_RET_ALLOW,
    libc::SECCOMP_RET_LOG,
    libc::SECCOMP_RET_TRACE,
    libc::SECCOMP_RET_USER_NOTIF,
];
const ACTION: u32 = libc::SECCOMP_RET_ACTION_FULL;

/// The places of a filter for values.
const PLACES: usize = 16;
/// The size of what a filter sees (`struct seccomp_data` of linux/seccomp.h), and the offsets of the number and the convention.
const DATA: u32 = 64;
const NUMBER: u32 = 0;
const ARCH: u32 = 4;

/// A system call, as a filter sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub number: u32,
    pub arch: u32,
}

/// How many more instructions may be looked at.
#[derive(Debug)]
pub(super) struct Budget(pub u64);

/// The registers and the places; `None` is what depends on arguments.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    a: Option<u32>,
    x: Option<u32>,
    places: [Option<u32>; PLACES],
}

/// An instruction (linux/filter.h).
#[derive(Debug, Clone, Copy)]
struct Instruction {
    code: u16,
    jump: (u8, u8),
    k: u32,
}

/// Where a filter goes from an instruction.
enum Next {
    On,
    To(usize),
    Either(usize, usize),
    Return(Option<u32>),
}

/// Whether a system call may go on by a filter. One that takes too long to look at lets everything through.
pub(super) fn lets_through(program: &[u8], call: Call, budget: &mut Budget) -> bool {
    let start = State { a: Some(0), x: Some(0), places: [Some(0); PLACES] };
    let (mut left, mut seen) = (vec![(0, start)], HashSet::new());
    while let Some((mut at, mut state)) = left.pop() {
        // The kernel takes no filter that goes on behind its end.
        while let Some(instruction) = instruction(program, at) {
            let Some(rest) = budget.0.checked_sub(1) else { return true };
            budget.0 = rest;
            at = match state.step(instruction, call) {
                Next::On => at + 1,
                Next::To(more) => at + 1 + more,
                Next::Either(one, other) => {
                    if !seen.insert((at, state.clone())) {
                        break;
                    }
                    left.push((at + 1 + other, state.clone()));
                    at + 1 + one
                }
                Next::Return(value) => {
                    if value.is_none_or(|value| GO_ON.contains(&(value & ACTION))) {
                        return true;
                    }
                    break;
                }
            };
        }
    }
    false
}

fn instruction(program: &[u8], at: usize) -> Option<Instruction> {
    let bytes = program.get(at * INSTRUCTION..)?.first_chunk::<INSTRUCTION>()?;
    let [c0, c1, yes, no, k @ ..] = *bytes;
    let (code, k) = (u16::from_ne_bytes([c0, c1]), u32::from_ne_bytes(k));
    Some(Instruction { code, jump: (yes, no), k })
}

impl State {
    fn step(&mut self, instruction: Instruction, call: Call) -> Next {
        let Instruction { code, jump, k } = instruction;
        // BPF_X: the operand is the other register.
        let operand = if code & 8 == 0 { Some(k) } else { self.x };
        let place = usize::try_from(k).ok().filter(|&place| place < PLACES);
        match code & 7 {
            0 => self.a = self.load(code, k, call),
            1 => self.x = self.load(code, k, call),
            2 => {
                if let Some(place) = place {
                    self.places[place] = self.a;
                }
            }
            3 => {
                if let Some(place) = place {
                    self.places[place] = self.x;
                }
            }
            4 => self.a = self.a.zip(operand).and_then(|(a, b)| calculated(code, a, b)),
            5 => return self.jump(code, jump, k, operand),
            6 => return Next::Return(if code & 0x18 == 0 { Some(k) } else { self.a }),
            _ if code & 0xf8 == 0 => self.x = self.a,
            _ => self.a = self.x,
        }
        Next::On
    }

    fn load(&self, code: u16, k: u32, call: Call) -> Option<u32> {
        match code & 0xe0 {
            // BPF_IMM, BPF_ABS, BPF_MEM, BPF_LEN.
            0x00 => Some(k),
            0x20 => match k {
                NUMBER => Some(call.number),
                ARCH => Some(call.arch),
                _ => None,
            },
            0x60 => self.places.get(usize::try_from(k).ok()?).copied().flatten(),
            0x80 => Some(DATA),
            _ => None,
        }
    }

    fn jump(&self, code: u16, (yes, no): (u8, u8), k: u32, operand: Option<u32>) -> Next {
        let (yes, no) = (usize::from(yes), usize::from(no));
        if code & 0xf0 == 0 {
            return Next::To(usize::try_from(k).unwrap_or(usize::MAX / INSTRUCTION / 2));
        }
        let Some((a, b)) = self.a.zip(operand) else { return Next::Either(yes, no) };
        let is_so = match code & 0xf0 {
            // BPF_JEQ, BPF_JGT, BPF_JGE, BPF_JSET.
            0x10 => a == b,
            0x20 => a > b,
            0x30 => a >= b,
            0x40 => a & b != 0,
            _ => return Next::Either(yes, no),
        };
        Next::To(if is_so { yes } else { no })
    }
}

/// What the arithmetic instructions make of two numbers.
fn calculated(code: u16, a: u32, b: u32) -> Option<u32> {
    match code & 0xf0 {
        // BPF_ADD, BPF_SUB, BPF_MUL, BPF_DIV, BPF_OR, BPF_AND, BPF_LSH, BPF_RSH, BPF_NEG, BPF_MOD, BPF_XOR.
        0x00 => Some(a.wrapping_add(b)),
        0x10 => Some(a.wrapping_sub(b)),
        0x20 => Some(a.wrapping_mul(b)),
        0x30 => a.checked_div(b),
        0x40 => Some(a | b),
        0x50 => Some(a & b),
        0x60 => a.checked_shl(b),
        0x70 => a.checked_shr(b),
        0x80 => Some(a.wrapping_neg()),
        0x90 => a.checked_rem(b),
        0xa0 => Some(a ^ b),
        _ => None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const X86_64: u32 = 0xc000_003e;
    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const ERRNO: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned();

    /// Instructions: code, where to when it is so and when not, and the operand.
    pub(in crate::seccomp) fn program(all: &[(u16, u8, u8, u32)]) -> Vec<u8> {
        let bytes = |&(code, yes, no, k): &(u16, u8, u8, u32)| {
            let [c0, c1] = code.to_ne_bytes();
            let [k0, k1, k2, k3] = k.to_ne_bytes();
            [c0, c1, yes, no, k0, k1, k2, k3]
        };
        all.iter().flat_map(bytes).collect()
    }

    fn lets(all: &[(u16, u8, u8, u32)], number: u32) -> bool {
        let call = Call { number, arch: X86_64 };
        lets_through(&program(all), call, &mut Budget(1000))
    }

    /// As libseccomp makes them: the convention, the number, and an argument.
    #[test]
    fn numbers_are_told_apart() {
        let all = [
            (0x20, 0, 0, 4),
            (0x15, 0, 8, X86_64),
            (0x20, 0, 0, 0),
            (0x35, 0, 1, 1 << 30),
            (0x06, 0, 0, ERRNO),
            (0x15, 3, 0, 7),
            (0x15, 0, 3, 9),
            (0x20, 0, 0, 16),
            (0x15, 0, 1, 3),
            (0x06, 0, 0, ALLOW),
            (0x06, 0, 0, ERRNO),
        ];
        // The second one with one argument only.
        assert_eq!(
            [7, 9, 8, 7 | 1 << 30].map(|number| lets(&all, number)),
            [true, true, false, false]
        );
        let other = Call { number: 7, arch: 0x4000_0003 };
        assert!(!lets_through(&program(&all), other, &mut Budget(1000)));
        // Without an end to the work there is no answer.
        let call = Call { number: 8, arch: X86_64 };
        assert!(lets_through(&program(&all), call, &mut Budget(3)));
    }

    #[test]
    fn each_action_after_which_it_goes_on_counts() {
        for action in GO_ON {
            assert!(lets(&[(0x06, 0, 0, action | 7)], 0), "{action:#x}");
        }
        for action in [0, 0x8000_0000, 0x0003_0000, ERRNO, 0x7000_0000] {
            assert!(!lets(&[(0x06, 0, 0, action)], 0), "{action:#x}");
        }
    }

    /// Values that are calculated, kept and brought back are known as far as no argument is in them.
    #[test]
    fn arithmetic_is_followed() {
        // (number << 1 | 1) ^ 15, kept, and back by way of the other register.
        let start = [(0x20, 0, 0, 0), (0x64, 0, 0, 1), (0x44, 0, 0, 1), (0xa4, 0, 0, 15)];
        let keep = [(0x02, 0, 0, 3), (0x00, 0, 0, 99), (0x61, 0, 0, 3), (0x87, 0, 0, 0)];
        let end = [(0x15, 0, 1, 4), (0x06, 0, 0, ALLOW), (0x06, 0, 0, 0)];
        let all = [&start[..], &keep, &end].concat();
        assert_eq!([5, 6].map(|number| lets(&all, number)), [true, false]);
        // What an argument is in may be anything.
        let all = [&[(0x20, 0, 0, 16), (0x54, 0, 0, 1)][..], &end].concat();
        assert!(lets(&all, 5));
        // A value that is returned, and a jump over everything.
        assert!(lets(&[(0x20, 0, 0, 24), (0x16, 0, 0, 0)], 0));
        assert!(!lets(&[(0x00, 0, 0, ERRNO), (0x16, 0, 0, 0)], 0));
        assert!(!lets(&[(0x05, 0, 0, 1), (0x06, 0, 0, ALLOW), (0x06, 0, 0, 0)], 0));
        assert!(!lets(&[(0x05, 0, 0, u32::MAX), (0x06, 0, 0, ALLOW)], 0));
    }

    /// A test of an argument for each step would be two ways each time.
    #[test]
    fn ways_that_meet_again_are_gone_once() {
        let mut all = vec![(0x20, 0, 0, 16)];
        all.extend([(0x15, 0, 0, 1); 200]);
        all.push((0x06, 0, 0, ERRNO));
        assert!(!lets(&all, 0));
    }
}
