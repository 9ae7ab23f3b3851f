// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Parts of machines: the kernel that they boot, Tombolo's module for it, and Tombolo's programs.

use std::cell::OnceCell;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use tombolo_e2e::debian::{self, Archive, Kernel, Which};
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::image::{Extra, Image};
use tombolo_e2e::module;
use tombolo_e2e::programs::Programs;
use tombolo_e2e::qemu::{self, Spec};
use tombolo_e2e::runner::Lacking;
use tombolo_e2e::vchan;

/// Path of the module in the guest's image.
pub const MODULE: &str = "/module.ko";
/// Options for a kernel that checks what it allocates, and that stops at the first warning.
const WATCHFUL: &str = "panic_on_warn=1 oops=panic slub_debug=FZPU page_owner=off hung_task_panic=1";

/// Returns whether guests boot the kernel of `make vm-debug`, which is many times slower.
pub fn checks_itself() -> bool {
    std::env::var_os("TOMBOLO_VM_KERNEL").is_some_and(|which| which == "debug")
}

/// The kernel, the module and the programs. The kernel and the module are there from the start; the programs are built
/// when they are first needed.
pub struct Parts {
    /// Debian's archive.
    pub archive: Archive,
    /// The kernel that guests boot.
    pub kernel: Kernel,
    module: PathBuf,
    programs: OnceCell<Result<Programs>>,
    vchans: OnceCell<Result<Vec<Extra>>>,
    /// Lock held while the parts exist, because everything that is built for guests is in one place.
    _lock: File,
}

impl Parts {
    /// Gets the kernel and builds the module; programs are built later.
    pub fn prepare() -> std::result::Result<Self, Lacking> {
        let need = |why: Error| Lacking::Need(why.to_string());
        for (program, package) in [(qemu::PROGRAM, "qemu-system-x86"), ("make", "make"), ("cc", "gcc")] {
            let version = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
            version.context(format!("no {program} (package {package})")).map_err(need)?;
        }
        let archive = Archive::open().map_err(need)?;
        let kernel = match std::env::var("TOMBOLO_VM_KERNEL").as_deref() {
            Ok("debug") => archive.debug_kernel(),
            Ok("newest") => archive.kernel(Which::Newest, true),
            _ => archive.kernel(Which::Stable, true),
        };
        let kernel = kernel.context("no kernel to boot").map_err(need)?;
        let target = module::target().map_err(Lacking::Fault)?;
        let lock = debian::lock(&target.join("lock")).map_err(Lacking::Fault)?;
        let module = module::build(&module::source(), &kernel, &[]).map_err(Lacking::Fault)?;
        Ok(Self { archive, kernel, module, programs: OnceCell::new(), vchans: OnceCell::new(), _lock: lock })
    }

    /// Does the same for a caller that cannot skip.
    pub fn get() -> Result<Self> {
        Self::prepare().map_err(|lacking| match lacking {
            Lacking::Need(why) => Error::new(format!("not to be had here: {why}")),
            Lacking::Fault(why) => why,
        })
    }

    /// Returns Tombolo's own programs, built when they are first needed.
    pub fn programs(&self) -> Result<&Programs> {
        self.programs.get_or_init(Programs::build).as_ref().map_err(Clone::clone)
    }

    /// Returns programs that use vchans, built when they are first needed.
    pub fn vchans(&self) -> Result<&[Extra]> {
        self.vchans.get_or_init(vchan::apart).as_deref().map_err(Clone::clone)
    }

    /// Describes a machine with the agent and the module in it.
    pub fn spec(&self, name: &str) -> Result<Spec> {
        self.spec_with(name, |_| Ok(()))
    }

    /// Describes the same machine, with additions to its files by `more`.
    pub fn spec_with(&self, name: &str, more: impl FnOnce(&mut Image) -> Result<()>) -> Result<Spec> {
        let mut image = Image::with_agent()?;
        image.add(MODULE.trim_start_matches('/'), &self.module)?;
        more(&mut image)?;
        let mut spec = Spec::new(name, self.kernel.image(), image.seal()?);
        spec.append = WATCHFUL.to_owned();
        if checks_itself() {
            // KASAN and lockdep need memory for their records.
            spec.memory = 768;
        }
        spec.kvm = std::env::var_os("TOMBOLO_VM_KVM").is_some_and(|wanted| wanted == "1");
        Ok(spec)
    }
}
