// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The C programs again, under two memory checkers.

mod common;

use std::process::{Command, Stdio};

use common::{Kit, Place, SANITIZED, VALGRIND, has, pairs, skip};

fn valgrind(test: &str) -> bool {
    has(test, "pkg-config") && has(test, "valgrind")
}

fn sanitizers(test: &str) -> bool {
    let mut compile = Command::new("sh");
    compile.args(["-c", "echo 'int main(void){}' | cc -fsanitize=address,undefined -x c -o /dev/null -"]);
    let there = compile.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if !there {
        skip(test, "asan", "cc has no AddressSanitizer here (package libasan8 or its like)");
    }
    there && has(test, "pkg-config")
}

macro_rules! under {
    ($($sanitized:ident, $valgrind:ident: $pair:ident;)*) => {$(
        #[test]
        fn $sanitized() {
            if sanitizers(stringify!($sanitized)) {
                pairs::$pair(&SANITIZED);
            }
        }

        #[test]
        fn $valgrind() {
            if valgrind(stringify!($valgrind)) {
                pairs::$pair(&VALGRIND);
            }
        }
    )*};
}

under! {
    sanitized_echo_is_clean, valgrind_echo_is_clean: echo;
    sanitized_copy_is_clean, valgrind_copy_is_clean: copy;
    sanitized_sum_is_clean, valgrind_sum_is_clean: sum;
    sanitized_chat_is_clean, valgrind_chat_is_clean: chat;
    sanitized_calls_are_clean, valgrind_calls_are_clean: calls;
    sanitized_threads_are_clean, valgrind_threads_are_clean: threads;
    sanitized_fork_is_clean, valgrind_fork_is_clean: fork;
}

/// Runs a program that loses a handle. Returns its checker's report.
fn leak(kit: &Kit) -> (Option<i32>, String) {
    let place = Place::new();
    let (code, _, said) = kit.start(&kit.program("leak.c"), &[&place.address()]).ends();
    (code, said)
}

#[test]
fn sanitized_canary_forgotten_handle_is_told() {
    if sanitizers("sanitized_canary_forgotten_handle_is_told") {
        let (code, said) = leak(&SANITIZED);
        assert!(code != Some(0) && said.contains("detected memory leaks"), "{said}");
    }
}

#[test]
fn valgrind_canary_forgotten_handle_is_told() {
    if valgrind("valgrind_canary_forgotten_handle_is_told") {
        let (code, said) = leak(&VALGRIND);
        assert!(code == Some(99) && said.contains("definitely lost"), "{said}");
    }
}
