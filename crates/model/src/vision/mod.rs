//! Pictures in a decoder: an encoder ([`encoder`]) and a connector ([`connector`]) turn what [`tunesmith_vision::Pixels`] holds
//! into rows of the decoder's width, and these replace rows of the embedding's output. Gradients flow back through them to
//! whatever is trained.
//!
//! A caller does four things:
//!
//! 1. It describes encoder and connector, and puts the description on the architecture before a model is loaded, or its
//!    trained tensors are listed: `arch.vision = Some(Arc::new(VisionArch { training, ..VisionArch::pair(dir, &pairing, &arch)? }))`,
//!    or [`VisionArch::of_model`](tunesmith_config::vision::VisionArch::of_model) for a composite checkpoint. From then on [`crate::Model::load`]
//!    loads it too, [`crate::targets::Targets::tensors`] has what is trained of it, and [`crate::Params`] its values.
//! 2. It gives pictures to training and evaluation in [`tunesmith_data::batch::Batch::images`]: for each its
//!    [`Pixels`](tunesmith_vision::Pixels) and the rows of the flat stream that show it.
//!    [`VisionArch::rows`](tunesmith_config::vision::VisionArch::rows) says how many rows a picture takes.
//! 3. For generation it makes a text's cache by [`crate::Model::cache_with_images`], whose rows count from the text's start, and goes
//!    on as without pictures: the prompt's tokens, with any id in the places of image rows, then those that are generated.
//!    Caches of texts with different pictures must not be shared, though their tokens may be equal.
//! 4. It saves, freezes and loads by names: those of Transformers 5.
