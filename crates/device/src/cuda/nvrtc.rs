//! Compiles kernels for a GPU, and caches the results for later processes.
use super::blas::Number;
use super::library::{self, Code, Handle, Nvrtc};
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::ptr;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// A header that every source may include.
const HEADER: &str = include_str!("dev.cuh");

/// An upper limit of our cubins in bytes; a larger file was not written by us.
const LARGEST: u64 = 64 << 20;

/// A header that the sources of one folder include besides `dev.cuh`: its name and its text.
pub type Header = (&'static str, &'static str);

/// The CUDA source of some kernels.
#[derive(Debug)]
pub struct Source {
    name: &'static str,
    text: &'static str,
    headers: &'static [Header],
    /// What `act` stands for in it.
    number: Option<Number>,
}

impl Source {
    /// Names a source: the name appears in the compiler's messages, and no other source has it.
    pub const fn new(name: &'static str, text: &'static str) -> Self {
        Self { name, text, headers: &[], number: None }
    }

    /// As [`Source::new`], of kernels whose names are written `TYPED(name)`: in them `act` is this type of numbers.
    pub const fn typed(name: &'static str, text: &'static str, number: Number) -> Self {
        Self { name, text, headers: &[], number: Some(number) }
    }

    /// Adds the headers that it includes besides `dev.cuh`.
    #[must_use]
    pub const fn with_headers(self, headers: &'static [Header]) -> Self {
        Self { headers, ..self }
    }

    /// What `act` stands for in it.
    pub const fn number(&self) -> Option<Number> {
        self.number
    }

    /// Its name in the compiler's messages; no other source has it.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The text that the compiler gets, without its headers.
    pub const fn text(&self) -> &'static str {
        self.text
    }
}

/// A source, its compiler options, and the path of the cached result.
pub(super) struct Program<'a> {
    source: &'a Source,
    nvrtc: &'static Nvrtc,
    options: Vec<String>,
    /// PTX, which the driver compiles: this NVRTC is older than the GPU.
    ptx: bool,
    file: Option<PathBuf>,
}

impl<'a> Program<'a> {
    /// The program for a GPU of this compute capability.
    pub(super) fn new(source: &'a Source, capability: (u32, u32)) -> Result<Self> {
        let nvrtc = library::nvrtc()?;
        let wanted = (capability.0 * 10 + capability.1) as c_int;
        let archs = nvrtc.architectures()?;
        let known = archs.contains(&wanted);
        let best = archs.iter().copied().filter(|&arch| arch <= wanted).max();
        let Some(arch) = best else {
            let message =
                format!("NVRTC {}.{} cannot compile for this GPU (sm_{wanted})", nvrtc.number().0, nvrtc.number().1);
            return Err(Error::device(message).hint("a GPU of compute capability 8.0 or newer is needed"));
        };
        let kind = if known { "sm" } else { "compute" };
        let options = vec![format!("--gpu-architecture={kind}_{arch}"), "--std=c++17".into(), "-default-device".into()];
        let typed = source.number.map(|number| format!("--define-macro=act={}", number.name()));
        let options = options.into_iter().chain(typed).collect();
        let mut program = Self { source, nvrtc, options, ptx: !known, file: None };
        let folder = library::test_folder().or_else(files::user_cache).map(|folder| folder.join("cuda"));
        program.file = folder.map(|folder| folder.join(format!("{}.cubin", program.key())));
        Ok(program)
    }

    /// A hash of everything that the result depends on.
    fn key(&self) -> String {
        let mut hash = blake3::Hasher::new();
        let (major, minor) = self.nvrtc.number();
        let parts =
            [self.source.name(), self.source.text(), HEADER, &format!("{major}.{minor}"), &self.options.join(" ")];
        let headers = self.source.headers.iter().flat_map(|(name, text)| [*name, *text]);
        for part in parts.into_iter().chain(headers) {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        hash.finalize().to_hex()[..32].to_owned()
    }

    /// The result that an earlier process cached.
    pub(super) fn kept(&self) -> Option<Vec<u8>> {
        files::read_own(self.file.as_ref()?, LARGEST).ok().filter(|image| !image.is_empty())
    }

    /// Caches the result for later processes. If it cannot be written, they compile again.
    pub(super) fn keep(&self, image: &[u8]) {
        if let Some(file) = &self.file {
            let _ = std::fs::create_dir_all(files::parent(file));
            let _ = files::atomic::write(file, image);
        }
    }

    /// Removes the cached result.
    #[cfg(test)]
    pub(super) fn forget(&self) {
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }

    /// Compiles the source for the GPU.
    pub(super) fn compile(&self) -> Result<Vec<u8>> {
        self.compile_with(&[]).map(|(image, _)| image)
    }

    /// Compiles with further options. Also returns the compiler's log.
    pub(super) fn compile_with(&self, more: &[&str]) -> Result<(Vec<u8>, String)> {
        let ended = |text: &str| {
            CString::new(text).map_err(|_| Error::device(format!("{}: a source with a NUL byte", self.source.name())))
        };
        let (text, name) = (ended(self.source.text())?, ended(&format!("{}.cu", self.source.name()))?);
        let all = [("dev.cuh", HEADER)].into_iter().chain(self.source.headers.iter().copied());
        let files = all.map(|(name, text)| Ok((ended(name)?, ended(text)?))).collect::<Result<Vec<_>>>()?;
        let (names, headers): (Vec<_>, Vec<_>) =
            files.iter().map(|(name, text)| (name.as_ptr(), text.as_ptr())).unzip();
        let count = files.len() as c_int;
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: all are C strings, as many names as headers, and it writes one handle.
        let code = unsafe {
            (self.nvrtc.create)(&raw mut handle, text.as_ptr(), name.as_ptr(), count, headers.as_ptr(), names.as_ptr())
        };
        self.nvrtc.check("nvrtcCreateProgram", code)?;
        let open = Open { nvrtc: self.nvrtc, handle };
        let all = self.options.iter().map(String::as_str).chain(more.iter().copied());
        let options = all.map(ended).collect::<Result<Vec<_>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is open, and the options are C strings.
        let code = unsafe { (self.nvrtc.compile)(handle, pointers.len() as c_int, pointers.as_ptr()) };
        let log = open.text("nvrtcGetProgramLog", self.nvrtc.log_size, self.nvrtc.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        self.nvrtc.check("nvrtcCompileProgram", code).map_err(|error| {
            error.context(format!("kernels {}", self.source.name())).hint(format!("the compiler says: {log}"))
        })?;
        let image = if self.ptx {
            open.text("nvrtcGetPTX", self.nvrtc.ptx_size, self.nvrtc.ptx)?
        } else {
            open.text("nvrtcGetCUBIN", self.nvrtc.cubin_size, self.nvrtc.cubin)?
        };
        Ok((image, log))
    }
}

/// A program in NVRTC, which is destroyed on drop.
struct Open {
    nvrtc: &'static Nvrtc,
    handle: Handle,
}

impl Open {
    /// What NVRTC's function `get` returns, given the function `size` that says how long it is. `name` is for messages.
    fn text(
        &self,
        name: &str,
        size: unsafe extern "C" fn(Handle, *mut usize) -> Code,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> Code,
    ) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is open; it writes one number.
        self.nvrtc.check(&format!("{name}Size"), unsafe { size(self.handle, &raw mut bytes) })?;
        let mut text = vec![0u8; bytes];
        // SAFETY: there is room for as many bytes as it says it writes.
        self.nvrtc.check(name, unsafe { get(self.handle, text.as_mut_ptr().cast()) })?;
        Ok(text)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: nothing else has the handle.
        unsafe { (self.nvrtc.destroy)(&raw mut self.handle) };
    }
}

impl Nvrtc {
    fn check(&self, call: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: it returns a constant C string for any code.
        let text = unsafe { CStr::from_ptr((self.error_text)(code)) };
        Err(Error::device(format!("{call} failed: {}", text.to_string_lossy())))
    }

    /// The compute capabilities that this NVRTC compiles for, times ten.
    fn architectures(&self) -> Result<Vec<c_int>> {
        let mut count = 0;
        // SAFETY: it writes one number.
        self.check("nvrtcGetNumSupportedArchs", unsafe { (self.count_archs)(&raw mut count) })?;
        let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: there is room for as many as it says.
        self.check("nvrtcGetSupportedArchs", unsafe { (self.archs)(archs.as_mut_ptr()) })?;
        Ok(archs)
    }
}
