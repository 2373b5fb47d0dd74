"""Muse Glimmer's language model alone, which Transformers has only inside of its multimodal class: the same head on the same text model.
wrapped.py holds it against that class."""
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerPreTrainedModel, MuseGlimmerTextModel


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):
    config: transformers.MuseGlimmerTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, labels=None,
                use_cache=None, logits_to_keep=0, **kwargs):
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
                            inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs)
        hidden = output.last_hidden_state
        cap = self.config.final_logit_softcapping
        logits = (self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden) * self.config.output_multiplier / cap).tanh() * cap
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=output.past_key_values)


transformers.AutoModelForCausalLM.register(transformers.MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True)
