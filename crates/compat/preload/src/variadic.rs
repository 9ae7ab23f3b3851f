// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exported functions whose arguments only libc knows. Each does something first, and then goes on with libc's own
//! function and the arguments as they are.
//!
//! `unsafe` is needed because a function that leaves all arguments where they are can only be written in assembly.
#![allow(unsafe_code)]

use std::{
    arch::naked_asm,
    ffi::{c_int, c_void},
};

use crate::{handback::bypassed, life, real};

/// Prepares for this program's image to be replaced.
fn leaving(_: c_int) {
    life::leaving();
}

macro_rules! first {
    ($($name:ident: $what:ident;)*) => {$(
        /// # Safety
        /// As libc's function of this name, whose arguments these are.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            /// Does what is to be done first, and returns the address of libc's function.
            extern "C" fn prepare(fd: c_int) -> *mut c_void {
                $what(fd);
                real::address(concat!(stringify!($name), "\0"))
            }
            // The registers that hold arguments are kept; saving these also aligns the stack for the call.
            naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "sub rsp, 128",
                "movups [rsp], xmm0", "movups [rsp + 16], xmm1", "movups [rsp + 32], xmm2", "movups [rsp + 48], xmm3",
                "movups [rsp + 64], xmm4", "movups [rsp + 80], xmm5", "movups [rsp + 96], xmm6", "movups [rsp + 112], xmm7",
                "call {prepare}",
                "mov r11, rax",
                "movups xmm0, [rsp]", "movups xmm1, [rsp + 16]", "movups xmm2, [rsp + 32]", "movups xmm3, [rsp + 48]",
                "movups xmm4, [rsp + 64]", "movups xmm5, [rsp + 80]", "movups xmm6, [rsp + 96]", "movups xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
                prepare = sym prepare,
            )
        }
    )*};
}

first! {
    execl: leaving;
    execle: leaving;
    execlp: leaving;
    dprintf: bypassed;
    vdprintf: bypassed;
    __dprintf_chk: bypassed;
    __vdprintf_chk: bypassed;
}
