// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the stand-in device looks and behaves: environment variables, read once when the driver is initialised.

use std::path::PathBuf;
use std::time::Duration;

/// The device and the checks.
#[derive(Clone, Debug)]
pub struct Config {
    /// `CPATTN_EMU_SEED`: seed of every order that is chosen.
    pub seed: u64,
    /// `CPATTN_EMU_EAGER=1`: everything runs at once and in order, as on a friendly machine.
    pub eager: bool,
    /// `CPATTN_EMU_SM`: compute capability, 80 for 8.0.
    pub sm: u32,
    /// `CPATTN_EMU_DEVICES`: how many devices there are.
    pub devices: u32,
    /// `CPATTN_EMU_SMS`: multiprocessors of a device.
    pub multiprocessors: u32,
    /// `CPATTN_EMU_MEMORY`: bytes of device memory.
    pub memory: usize,
    /// `CPATTN_EMU_L2`: bytes of the L2 cache that the device says it has.
    pub l2: u32,
    /// `CPATTN_EMU_REFUSE`: the target (`sm_90a`) of modules that are not loaded, as by a driver whose compiler fails.
    pub refuse: Option<String>,
    /// `CPATTN_EMU_UNINIT=0` turns the reports of unwritten memory off.
    pub uninitialised: bool,
    /// `CPATTN_EMU_RACES=0` turns the race detectors off.
    pub races: bool,
    /// `CPATTN_EMU_LANES=0` no longer reports lanes of one warp that race in global memory.
    pub lanes: bool,
    /// `CPATTN_EMU_COUNT=1` prints blocks, instruction counts and bank conflicts of every launch.
    pub count: bool,
    /// `CPATTN_EMU_REPORT`: a file that reports are appended to, besides standard error.
    pub report: Option<PathBuf>,
    /// `CPATTN_EMU_CALLS`: a file that the counts of calls are appended to when the program ends.
    pub calls: Option<PathBuf>,
    /// `CPATTN_EMU_PEERS=0`: no device can be given access to the memory of another.
    pub peers: bool,
    /// `CPATTN_EMU_IDLE=1`: calls are checked and counted, and nothing is done: for the time that a program spends on
    /// them.
    pub idle: bool,
    /// `CPATTN_EMU_PATIENCE`: seconds that the host waits for what cannot go on, before that is an error.
    pub patience: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            seed: 0,
            eager: false,
            sm: 80,
            devices: 1,
            multiprocessors: 4,
            memory: 8 << 30,
            l2: 40 << 20,
            refuse: None,
            uninitialised: true,
            races: true,
            lanes: true,
            count: false,
            report: None,
            calls: None,
            peers: true,
            idle: false,
            patience: Duration::from_secs(120),
        }
    }
}

impl Config {
    /// From the environment.
    pub(crate) fn from_env() -> Self {
        let number =
            |name: &str, default: u64| std::env::var(name).ok().and_then(|v| v.trim().parse().ok()).unwrap_or(default);
        let d = Self::default();
        Self {
            seed: number("CPATTN_EMU_SEED", d.seed),
            eager: number("CPATTN_EMU_EAGER", 0) != 0,
            sm: number("CPATTN_EMU_SM", d.sm.into()) as u32,
            devices: number("CPATTN_EMU_DEVICES", d.devices.into()) as u32,
            multiprocessors: number("CPATTN_EMU_SMS", d.multiprocessors.into()).clamp(1, 1024) as u32,
            memory: number("CPATTN_EMU_MEMORY", d.memory as u64) as usize,
            l2: number("CPATTN_EMU_L2", d.l2.into()).min(i32::MAX as u64) as u32,
            refuse: std::env::var("CPATTN_EMU_REFUSE").ok().filter(|target| !target.is_empty()),
            uninitialised: number("CPATTN_EMU_UNINIT", 1) != 0,
            races: number("CPATTN_EMU_RACES", 1) != 0,
            lanes: number("CPATTN_EMU_LANES", 1) != 0,
            count: number("CPATTN_EMU_COUNT", 0) != 0,
            report: std::env::var_os("CPATTN_EMU_REPORT").map(PathBuf::from),
            calls: std::env::var_os("CPATTN_EMU_CALLS").map(PathBuf::from),
            peers: number("CPATTN_EMU_PEERS", 1) != 0,
            idle: number("CPATTN_EMU_IDLE", 0) != 0,
            patience: Duration::from_secs(number("CPATTN_EMU_PATIENCE", d.patience.as_secs())),
        }
    }

    /// Bytes of shared memory a block may opt in to.
    pub(crate) fn shared_optin(&self) -> u32 {
        match self.sm {
            90..=119 => 227 << 10,
            86..=89 | 120.. => 99 << 10,
            80..=85 => 163 << 10,
            75..=79 => 64 << 10,
            _ => 96 << 10,
        }
    }

    /// Bytes of shared memory of a multiprocessor.
    pub(crate) fn shared_total(&self) -> u32 {
        self.shared_optin() + 1024
    }

    /// Threads of a multiprocessor.
    pub(crate) fn threads_total(&self) -> u32 {
        if matches!(self.sm, 86..=89 | 120..) { 1536 } else { 2048 }
    }
}
