// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds the images of dom0 and of domUs.

use super::packages::Packages;
use crate::error::Result;
use crate::image::{Extra, Image, LIBRARIES};
use crate::modules;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Modules that every domain loads for channels.
const CHANNELS: [&str; 4] = ["xen-evtchn", "xen-gntdev", "xen-gntalloc", "xenfs"];
/// More modules that dom0 loads: the backends of domUs' networks, and its connections to the host.
const DOM0: [&str; 6] = ["xen-netback", "bridge", "virtio_pci", "virtio_console", "9pnet_virtio", "9p"];
const DOMU: [&str; 1] = ["xen-netfront"];
/// Xen's tools in every domain, and in dom0.
const EVERYWHERE: [&str; 2] = ["xenstore", "lsevtchn"];
const TOOLS: [&str; 7] =
    ["xl", "xenstored", "xenconsoled", "xen-init-dom0", "libxl-save-helper", "xentrace", "xentrace_setsize"];
/// Names under which one of the tools is installed.
const XENSTORE: [&str; 7] = ["ls", "read", "write", "rm", "list", "chmod", "watch"];

/// Libraries that possibly no program in the image lists. The C library loads the first when a thread is cancelled, as
/// those of XenStore's library are; and programs that are pushed later need both.
const ALWAYS: [&str; 2] = ["libgcc_s.so.1", "libm.so.6"];

/// Builds the image of dom0.
///
/// # Errors
/// A file is missing.
pub fn dom0(packages: &Packages, extra: &[Extra]) -> Result<OwnedFd> {
    let mut image = domain(packages, &[&CHANNELS[..], &DOM0].concat(), extra)?;
    for tool in TOOLS {
        image.add_packaged(&format!("bin/{tool}"), &packages.program(tool)?, &packages.root)?;
    }
    for folder in ["etc/xen", "var/lib/xen", "var/lib/xenstored", "var/log/xen/console", "var/lock", "share"] {
        image.add_empty(folder);
    }
    image.add_link("var/run", "/run");
    image.add_bytes("etc/xen/xl.conf", b"run_hotplug_scripts=0\nautoballoon=\"off\"\n");
    image.seal()
}

/// Builds the image of domUs.
///
/// # Errors
/// A file is missing.
pub fn domu(packages: &Packages, extra: &[Extra]) -> Result<OwnedFd> {
    domain(packages, &[&CHANNELS[..], &DOMU].concat(), extra)?.seal()
}

fn domain(packages: &Packages, drivers: &[&str], extra: &[Extra]) -> Result<Image> {
    let mut image = Image::with_agent()?;
    for (number, path) in modules::of(&packages.kernel, drivers)?.iter().enumerate() {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        image.add_bytes(&format!("modules/{number:02}-{name}"), &modules::content(path)?);
    }
    image.add_busybox(&packages.program("busybox")?)?;
    for tool in EVERYWHERE {
        image.add_packaged(&format!("bin/{tool}"), &packages.program(tool)?, &packages.root)?;
    }
    for name in XENSTORE {
        image.add_link(&format!("bin/xenstore-{name}"), "xenstore");
    }
    for library in ALWAYS {
        let path = format!("{LIBRARIES}/{library}");
        image.add(&path, &Path::new("/").join(&path))?;
    }
    for (name, from) in extra {
        image.add_packaged(name, from, &packages.root)?;
    }
    Ok(image)
}
