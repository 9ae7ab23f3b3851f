// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The images of dom0 and of domUs.

use super::packages::Packages;
use crate::error::{Context, Result};
use crate::image::Image;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// What every domain loads for channels.
const CHANNELS: [&str; 4] = ["xen-evtchn", "xen-gntdev", "xen-gntalloc", "xenfs"];
/// What dom0 loads besides: the other ends of domUs' networks, and its ways to the host.
const DOM0: [&str; 6] = ["xen-netback", "bridge", "virtio_pci", "virtio_console", "9pnet_virtio", "9p"];
const DOMU: [&str; 1] = ["xen-netfront"];
/// Xen's tools in dom0.
const TOOLS: [&str; 9] = [
    "xl",
    "xenstored",
    "xenconsoled",
    "xen-init-dom0",
    "libxl-save-helper",
    "xentrace",
    "xentrace_setsize",
    "xenstore",
    "lsevtchn",
];
/// The names under which one of the tools goes.
const XENSTORE: [&str; 7] = ["ls", "read", "write", "rm", "list", "chmod", "watch"];

/// A file for an image: its path there, and here.
pub type Extra = (String, PathBuf);

/// The image of dom0.
///
/// # Errors
/// Something is missing.
pub fn dom0(packages: &Packages, extra: &[Extra]) -> Result<OwnedFd> {
    let mut builder = Builder::new(packages, CHANNELS.iter().chain(&DOM0))?;
    for tool in TOOLS {
        builder.program(&format!("bin/{tool}"), &packages.program(tool)?)?;
    }
    for name in XENSTORE {
        builder.image.add_link(&format!("bin/xenstore-{name}"), "xenstore");
    }
    for folder in ["etc/xen", "var/lib/xen", "var/lib/xenstored", "var/log/xen/console", "var/lock", "share"] {
        builder.image.add_empty(folder);
    }
    builder.image.add_link("var/run", "/run");
    builder.image.add_text("etc/xen/xl.conf", "run_hotplug_scripts=0\nautoballoon=\"off\"\n");
    builder.finish(extra)
}

/// The image of domUs.
///
/// # Errors
/// Something is missing.
pub fn domu(packages: &Packages, extra: &[Extra]) -> Result<OwnedFd> {
    let mut builder = Builder::new(packages, CHANNELS.iter().chain(&DOMU))?;
    for tool in ["xenstore", "lsevtchn"] {
        builder.program(&format!("bin/{tool}"), &packages.program(tool)?)?;
    }
    for name in XENSTORE {
        builder.image.add_link(&format!("bin/xenstore-{name}"), "xenstore");
    }
    builder.finish(extra)
}

struct Builder<'a> {
    packages: &'a Packages,
    image: Image,
    libraries: BTreeSet<PathBuf>,
}

impl<'a> Builder<'a> {
    fn new<'m>(packages: &'a Packages, modules: impl Iterator<Item = &'m &'m str>) -> Result<Self> {
        let mut image = Image::with_agent()?;
        let mut order = Vec::new();
        for module in modules {
            order.extend(packages.module(module)?);
        }
        let mut loaded = BTreeSet::new();
        order.retain(|path| loaded.insert(path.clone()));
        for (number, path) in order.iter().enumerate() {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            image.add(&format!("modules/{number:02}-{name}"), path)?;
        }
        image.add("bin/busybox", &packages.program("busybox")?)?;
        image.add_link("bin/sh", "busybox");
        Ok(Self { packages, image, libraries: BTreeSet::new() })
    }

    fn program(&mut self, name: &str, from: &Path) -> Result<()> {
        self.image.add(name, from)?;
        self.libraries.extend(self.packages.libraries(from).context(name)?);
        Ok(())
    }

    fn finish(mut self, extra: &[Extra]) -> Result<OwnedFd> {
        for (name, from) in extra {
            self.program(name, from)?;
        }
        for library in &self.libraries {
            let name = library.file_name().unwrap_or_default().to_string_lossy();
            self.image.add(&format!("usr/lib/x86_64-linux-gnu/{name}"), library)?;
        }
        self.image.seal()
    }
}
