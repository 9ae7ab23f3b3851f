// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares the module's check of a header (`kernel/ivshmem/frame.c`), compiled unchanged into a program, with the one
//! written in Rust: both must judge the same headers alike. Broken variants must be found.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use tombolo_net::{DropReason, FRAME_MOST, Features, HEAD, HEADER, Hello, Limits, Mac};

const SENDER: Mac = Mac([2, 0, 0, 0, 0, 9]);
/// `TOMBOLO_NET_HEADER` and `TOMBOLO_NET_FEATURE`.
const DROPPED: [(u8, DropReason); 2] = [(6, DropReason::Header), (7, DropReason::Feature)];
/// Length of an answer, with the judged header.
const ANSWER: usize = 2 + HEADER;

/// A header, and the values by which it is judged.
#[derive(Clone, Copy, Debug)]
struct Case {
    header: [u8; HEADER],
    /// Length of the frame.
    len: u32,
    takes: u32,
    gives: u32,
}

impl Case {
    fn encode(&self) -> Vec<u8> {
        let numbers = [self.len, self.takes, self.gives].map(u32::to_le_bytes).concat();
        [&self.header[..], &numbers].concat()
    }

    /// Returns the verdict of Rust's check with these features.
    fn judge(&self, features: u32) -> Result<[u8; HEADER], DropReason> {
        let mut head = [0; HEAD];
        head[..HEADER].copy_from_slice(&self.header);
        head[HEADER + 6..HEADER + 12].copy_from_slice(&SENDER.0);
        let features = Features::from_bits(u64::from(features));
        let receiver = Hello { features, mtu: 1500, frame_most: FRAME_MOST, mac: Mac([2, 0, 0, 0, 0, 1]) };
        Limits::new(&receiver, Some(SENDER)).check(self.len as usize + HEADER, &mut head)?;
        Ok(head[..HEADER].try_into().expect("a header"))
    }

    /// Returns whether an answer agrees with Rust's check, for received and for sent frames.
    fn agrees(&self, answer: &[u8]) -> bool {
        let counted = DROPPED.iter().find(|(number, _)| *number == answer[0]).map(|(_, why)| *why);
        let (judged, is_checked_alike) = match self.judge(self.takes) {
            Ok(left) => (None, answer[0] == 0xff && answer[2..] == left),
            Err(why) => (Some(why), true),
        };
        // The own stack's headers are valid: only the features that they need are checked.
        let goes_alike = self.judge(0x1f).is_err() || self.judge(self.gives).is_ok() == (answer[1] == 1);
        judged == counted && is_checked_alike && goes_alike
    }
}

/// Returns headers of which most are nearly valid, in a fixed order.
fn cases() -> Vec<Case> {
    let mut state = 88_172_645_463_325_252_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 11
    };
    let mut pick = move |among: &[u16]| among[next() as usize % among.len()];
    let lens = [14, 15, 60, 66, 1514, 9014, 65_535];
    let mut case = || {
        let len = pick(&lens);
        let near = |pick: &mut dyn FnMut(&[u16]) -> u16, less: u16| {
            let near = len.saturating_sub(less);
            pick(&[near.wrapping_sub(1), near, near.saturating_add(1)])
        };
        let start = match pick(&[0, 1, 2]) {
            0 => pick(&[0, 13, 14, 34, 54, 0xffff]),
            less => near(&mut pick, 2 * less),
        };
        let offset = match pick(&[0, 1, 2]) {
            0 => pick(&[0, 6, 16, 0xfffe, 0xffff]),
            1 => near(&mut pick, 2).wrapping_sub(start),
            _ => 16,
        };
        let header_len = if pick(&[0, 1]) == 0 { pick(&[0, 54, 0xffff]) } else { near(&mut pick, 0) };
        let size = pick(&[0, 1, 1448, 0xffff]);
        let (flags, kind) = (pick(&[0, 1, 1, 1, 2, 3, 4, 0x81]), pick(&[0, 1, 4, 5, 0x81, 0x84, 0x85, 0x80, 2, 3]));
        let buffers = pick(&[0, 0, 0, 0, 0, 0, 1, 0x100]);
        let fields = [header_len, size, start, offset, buffers].map(u16::to_le_bytes).concat();
        let header = [&[flags as u8, kind as u8], &fields[..]].concat().try_into().expect("a header");
        let mut features = || pick(&[0x1f, 0x1f, 0, 1, 3, 5, 7, 0x0b, 0x0d, 0x11, 0x13, 0x1b]).into();
        Case { header, len: len.into(), takes: features(), gives: features() }
    };
    (0..40_000).map(|_| case()).collect()
}

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn source() -> String {
    fs::read_to_string(root("kernel/ivshmem/frame.c")).unwrap()
}

/// Returns the cases in which a program made of `source` differs from Rust's check; `None` where nothing can be
/// compiled.
fn disagreements(test: &str, source: &str) -> Option<Vec<Case>> {
    if !Command::new("cc").arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success()) {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs cc): there is no C compiler");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let [frame, program] = ["frame.c", "judge"].map(|name| folder.path().join(name));
    fs::write(&frame, source).unwrap();
    let (stand_ins, uapi) = (root("crates/net/tests/kernel"), root("kernel/ivshmem/uapi"));
    let built = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Wno-unused", "-I"])
        .arg(&stand_ins)
        .arg("-I")
        .arg(uapi)
        .args([&frame, &stand_ins.join("main.c")])
        .arg("-o")
        .arg(&program)
        .status();
    assert!(built.unwrap().success(), "it does not compile");
    let cases = cases();
    let asked = folder.path().join("cases");
    fs::write(&asked, cases.iter().flat_map(Case::encode).collect::<Vec<_>>()).unwrap();
    let judged = Command::new(&program).stdin(fs::File::open(&asked).unwrap()).output().unwrap();
    assert!(judged.status.success() && judged.stdout.len() == cases.len() * ANSWER, "{judged:?}");
    let answers = cases.iter().zip(judged.stdout.chunks(ANSWER));
    Some(answers.filter(|(case, answer)| !case.agrees(answer)).map(|(case, _)| *case).collect())
}

#[test]
fn n4_n7_n8_module_judges_headers_as_the_program_does() {
    let Some(differ) = disagreements("n4_n7_n8_module_judges_headers_as_the_program_does", &source()) else { return };
    assert!(differ.is_empty(), "{} of them, such as {:?}", differ.len(), differ[0]);
    // The cases include every reason that is looked for, and many of them pass.
    let judged: Vec<_> = cases().iter().map(|case| case.judge(case.takes)).collect();
    let passed = judged.iter().filter(|judged| matches!(judged, Ok(header) if header[1] != 0)).count();
    let needed = judged.iter().filter(|judged| **judged == Err(DropReason::Feature)).count();
    assert!(passed > 100 && needed > 100, "{passed} segments pass, {needed} need what was not offered");
}

/// Changes that a careless edit could make; each must be found.
const BROKEN: [(&str, &str); 13] = [
    ("was.flags & ~flags || was.num_buffers", "was.num_buffers"),
    ("was.flags & ~flags || was.num_buffers", "was.flags & ~flags"),
    ("start < ETH_HLEN || start", "start"),
    ("start < ETH_HLEN ||", "start <= ETH_HLEN ||"),
    ("(__force __le16)was.csum_offset) + 2 > len", "(__force __le16)was.csum_offset) > len"),
    ("if (!(port->takes & TOMBOLO_NET_CHECKSUM))", "if (0)"),
    ("!(was.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM) || !was.gso_size", "!was.gso_size"),
    (" || !was.gso_size ||", " ||"),
    ("(__force __le16)was.hdr_len) > len", "(__force __le16)was.hdr_len) > len + 1"),
    ("memset(head, 0, sizeof(*head));", ""),
    ("if (was.gso_type & KIND_MARKED)", "if (0)"),
    ("if (needs & ~port->takes)", "if (0)"),
    ("return !(needs & ~port->gives);", "return true;"),
];

#[test]
fn n8_canary_broken_checks_of_the_module_are_found() {
    let source = source();
    for (whole, broken) in BROKEN {
        assert!(source.contains(whole), "frame.c says {whole:?} no more: break what it says now");
        let found = disagreements("n8_canary_broken_checks_of_the_module_are_found", &source.replace(whole, broken));
        let Some(differ) = found else { return };
        assert!(!differ.is_empty(), "{broken:?} in the place of {whole:?} was not found");
    }
}
