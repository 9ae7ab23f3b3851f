// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether pages can be counted is the kernel's present answer, and nothing else (M-7, L-6). A single test, because it
//! takes this process's last descriptor.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, AsRawFd},
    thread,
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use tombolo_mem::{SealError, check_sealed, counts_pages, create_sealed};

const CACHESTAT: i64 = 451;
const EPERM: u32 = 1;

/// Makes `cachestat` fail for this thread where `rules` match.
fn forbid_counting(rules: Vec<SeccompRule>) {
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let rules = [(CACHESTAT, rules)].into_iter().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(EPERM), arch).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

/// Returns whether the call exists and nothing filters it, by other means than the tested ones.
fn kernel_counts() -> bool {
    let name = rustix::system::uname();
    let mut numbers = name.release().to_str().unwrap().split(|other: char| !other.is_ascii_digit());
    let mut number = || numbers.next().and_then(|number| number.parse::<u32>().ok()).unwrap_or(0);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    (number(), number()) >= (6, 5) && status.lines().any(|line| line == "Seccomp:\t0")
}

#[test]
fn m7_whether_pages_can_be_counted_is_asked_anew_and_not_guessed_from_something_else() {
    // Before anything else, because the first answer counts.
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..before }).unwrap();
    let full: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    let when_full = counts_pages();
    drop(full);
    setrlimit(Resource::Nofile, before).unwrap();
    let (_own, fd) = create_sealed("test", 8192).unwrap();
    if !kernel_counts() {
        let test = "m7_whether_pages_can_be_counted_is_asked_anew_and_not_guessed_from_something_else";
        let _ = writeln!(io::stderr(), "SKIP {test} (needs cachestat): Linux 6.5, and no filter that forbids it");
        assert_eq!(check_sealed(fd.as_fd(), 8192), Ok(8192));
        return;
    }
    assert!(when_full, "a want of descriptors says nothing of the kernel");
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(check_sealed(fd.as_fd(), 8192), Ok(8192));
            forbid_counting(vec![]);
            assert!(!counts_pages(), "a filter that came later");
            assert_eq!(check_sealed(fd.as_fd(), 8192), Ok(8192), "is no fault of the peer's");
        });
        scope.spawn(|| {
            let number = fd.as_raw_fd() as u64;
            let is_it = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, number).unwrap();
            forbid_counting(vec![SeccompRule::new(vec![is_it]).unwrap()]);
            assert!(counts_pages());
            let refused = check_sealed(fd.as_fd(), 8192);
            assert_eq!(refused, Err(SealError::Uncountable), "what alone cannot be counted may hide holes");
        });
    });
}
