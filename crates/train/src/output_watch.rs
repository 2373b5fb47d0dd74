//! Detects that someone removed or replaced the output directory or a file of the run. The run then saves its state and
//! stops, instead of losing its results at the end.
use super::lock::DirLock;
use super::output;
use super::session::Session;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// The reason to stop if the output directory is gone.
pub const GONE: &str = "the output directory is gone";
/// The reason to stop if a file of the run was removed or replaced.
pub const REPLACED: &str = "a file of the run was removed or replaced";

impl Session<'_> {
    /// Whether the output directory is gone. If so, creates a new one, where the state will be saved, and asks the run to stop.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn output_is_gone(&mut self) -> Result<bool> {
        let Some(lock) = self.lock.as_mut().filter(|lock| !lock.is_there()) else { return Ok(false) };
        let fail =
            |error: Error| error.context("the output directory was removed or moved, and cannot be created again");
        lock.refuse_link()?;
        let mut new = DirLock::acquire(&self.plan.output_dir).map_err(fail)?;
        new.keep();
        *lock = new;
        self.stop.request(GONE);
        // A checkpoint that was being written is gone, too.
        let _ = self.saver.join();
        if !self.sharing.shares_state() {
            // The saved checkpoints are gone, too. Ranks that save together agree on that at their next save.
            (self.begun, self.saved) = (0, 0);
        }
        Ok(true)
    }

    /// Asks the run to stop if one of its files was removed or replaced. The state can still be saved: checkpoints have folders
    /// of their own.
    pub fn check_files(&mut self) {
        self.replaced_file = self.replaced_file.take().or_else(|| self.find_replaced());
        if self.replaced_file.is_some() {
            self.stop.request(REPLACED);
        }
    }

    fn find_replaced(&self) -> Option<String> {
        let lock = self.lock.as_ref()?;
        let output_dir = &self.plan.output_dir;
        let replaced = output::FILES.into_iter().find_map(|name| {
            let path = output_dir.join(name);
            let found = files::obstacle(&path)?;
            Some(format!("{} is {found}, expected a regular file", path.display()))
        });
        let gone = || {
            let metrics = self.metrics.as_ref().filter(|metrics| !metrics.is_in_place())?;
            Some(format!("{} was removed or replaced while the run wrote to it", metrics.path().display()))
        };
        // If the whole directory is gone, that is the reason to report.
        replaced.or_else(gone).filter(|_| lock.is_there())
    }
}
