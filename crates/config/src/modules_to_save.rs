//! The modules that are trained as a whole beside an adapter, whatever its kind.
use super::enums::Mode;
use super::schema::TuningConfig;

macro_rules! kinds {
    ($( $module:ident: $settings:ident = $mode:ident, $word:literal $( | $alias:literal ($alias_doc:literal) )?, $doc:literal; )*) => {
        impl TuningConfig {
            /// `modules_to_save` of the mode's kind of adapter; `None` for modes without adapters.
            pub const fn modules_to_save_mut(&mut self) -> Option<&mut Vec<String>> {
                match self.mode {
                    $( Mode::$mode => Some(&mut self.$module.modules_to_save), )*
                    Mode::Full | Mode::Freeze => None,
                }
            }
        }
    };
}
tunesmith_base::registry::adapters!(kinds);
