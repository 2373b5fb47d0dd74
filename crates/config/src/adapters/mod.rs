//! The settings of each kind of adapter, one file for each kind, named in [`tunesmith_base::registry`]. Their formulas are in `model::adapters`.
use super::enums::Mode;

macro_rules! kinds {
    ($( $module:ident: $settings:ident = $mode:ident, $word:literal $( | $alias:literal ($alias_doc:literal) )?, $doc:literal; )*) => {
        $( pub mod $module; )*

        /// First parts of adapter tensors' names, after the module's name.
        pub const PREFIXES: &[&str] = &[$( $module::PREFIX ),*];

        /// Whether a mode can train rows of new tokens with its adapters; `None` for modes without adapters.
        pub(crate) const fn trains_tokens(mode: Mode) -> Option<bool> {
            match mode {
                $( Mode::$mode => Some($module::TRAINS_TOKENS), )*
                Mode::Full | Mode::Freeze => None,
            }
        }
    };
}
tunesmith_base::registry::adapters!(kinds);
