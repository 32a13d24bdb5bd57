"""transformers' models freed of their float32: an oracle for models in float64."""

import torch
import torch.nn.functional as F


def in_float64(model, head_dim):
    """`model` with transformers' float32 islands, norms and rotary tables, written out in float64 (default rope)."""

    def norm(module, gemma):
        eps = module.eps if gemma else module.variance_epsilon
        return lambda x: x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (module.weight + gemma)

    def delta_net(module):
        """The gated delta rule token by token, as arXiv:2412.06464 writes it."""
        keys, values = module.key_dim, module.value_dim
        heads, repeats = module.num_v_heads, module.num_v_heads // module.num_k_heads

        def unit(x):
            x = x.unflatten(-1, (-1, module.head_k_dim)).repeat_interleave(repeats, 2)
            return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

        def forward(hidden_states, **_):
            hidden = hidden_states
            x = module.in_proj_qkv(hidden)
            padded = F.pad(x.mT, (module.conv_kernel_size - 1, 0))
            mixed = F.silu(F.conv1d(padded, module.conv1d.weight, groups=x.shape[-1])).mT
            q, k, v = mixed.split([keys, keys, values], -1)
            q, k, v = unit(q) * module.head_k_dim**-0.5, unit(k), v.unflatten(-1, (heads, -1))
            beta = module.in_proj_b(hidden).sigmoid()
            decay = (-module.A_log.exp() * F.softplus(module.in_proj_a(hidden) + module.dt_bias)).exp()
            state, out = x.new_zeros(len(x), heads, module.head_k_dim, module.head_v_dim), []
            for t in range(x.shape[1]):
                state = state * decay[:, t, :, None, None]
                wrong = v[:, t] - (k[:, t, :, None] @ state)[:, :, 0]
                state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * wrong)[:, :, None]
                out.append((q[:, t, :, None] @ state)[:, :, 0])
            out = torch.stack(out, 1)
            out = out / (out.square().mean(-1, keepdim=True) + module.norm.variance_epsilon).sqrt()
            normed = out * module.norm.weight
            gate = F.silu(module.in_proj_z(hidden))
            return module.out_proj(normed.flatten(2) * gate)

        return forward

    is_halved = model.config.model_type == "gpt_oss"  # whose tables have each angle once

    def rotary(theta):
        turned = int(head_dim * model.config.rope_parameters.get("partial_rotary_factor", 1.0))
        turn = torch.tensor([theta ** (-2 * i / turned) for i in range(turned // 2)], dtype=torch.float64)

        def forward(x, position_ids, layer_type=None):
            base = turn if layer_type is None else rotary(model.config.rope_parameters[layer_type]["rope_theta"]).turn
            position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids  # one for each axis of an image
            angles = (position_ids[..., None] * base).repeat(1, 1, 1 if is_halved else 2)
            return angles.cos(), angles.sin()

        forward.turn = turn
        return forward

    def router(module):
        normed = getattr(module, "norm_topk_prob", True)

        def forward(x):
            logits = F.linear(x, module.weight)
            weights, chosen = logits.softmax(-1).topk(module.top_k)
            return logits, weights / weights.sum(-1, keepdim=True) if normed else weights, chosen

        return forward

    def deepseek_router(module):
        """arXiv:2412.19437, equations 12 to 16, with groups as its section 2.1.2 describes their use over nodes."""

        def forward(x):
            x = x.flatten(0, -2)
            scores = F.linear(x, module.weight).sigmoid()
            biased = scores + module.e_score_correction_bias
            by_group = biased.view(len(x), module.num_group, -1)
            two_best = by_group.sort(-1, descending=True).values[..., :2].sum(-1)
            last_group = two_best.sort(-1, descending=True).values[:, module.topk_group - 1]
            left = torch.where((two_best >= last_group[:, None])[..., None], by_group, -torch.inf).flatten(1)
            chosen = left.sort(-1, descending=True).indices[:, : module.top_k]
            weights = scores.gather(1, chosen)
            if module.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return scores, weights * module.routed_scaling_factor, chosen

        return forward

    def gpt_oss_router(module):
        def forward(x):
            logits = F.linear(x, module.weight, module.bias)
            weights, chosen = logits.topk(module.top_k)
            return logits, weights.softmax(-1), chosen

        return forward

    def gemma4_router(module):
        def forward(x):
            shares = module.proj(module.norm(x) * module.scale * module.hidden_size**-0.5).softmax(-1)
            weights, chosen = shares.topk(module.config.top_k_experts)
            return shares, weights / weights.sum(-1, keepdim=True) * module.per_expert_scale[chosen], chosen

        return forward

    def gemma4_norm(module):
        eps, weight = module.eps, module.weight if module.with_scale else 1.0
        return lambda x: x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def gemma4_rotary(config):
        turns = {}
        for kind, rope in config.rope_parameters.items():
            size = config.per_layer_config[kind].head_dim
            turned = int(rope.get("partial_rotary_factor", 1.0) * size // 2)
            turns[kind] = [rope["rope_theta"] ** (-2 * i / size) for i in range(turned)] + [0.0] * (size // 2 - turned)

        def forward(x, position_ids, layer_type):
            turn = torch.tensor(turns[layer_type], dtype=torch.float64)
            angles = (position_ids[..., None] * turn).repeat(1, 1, 2)
            return angles.cos(), angles.sin()

        return forward

    for module in model.modules():
        kind = type(module).__name__
        if kind == "Gemma4RMSNorm":
            module.forward = gemma4_norm(module)
        elif "RMSNorm" in kind and not kind.endswith("Gated"):
            module.forward = norm(module, "Gemma" in kind or "Qwen3_5" in kind)
        if kind == "Gemma4TextRouter":
            module.forward = gemma4_router(module)
        if kind.endswith("TopKRouter"):
            module.forward = (gpt_oss_router if kind.startswith("GptOss") else router)(module)
        if kind == "DeepseekV3TopkRouter":
            module.forward = deepseek_router(module)
        if kind.endswith("GatedDeltaNet"):
            module.forward = delta_net(module)
        if "ScaledWordEmbedding" in type(module).__name__:
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    if model.config.model_type == "gemma4_text":
        model.model.rotary_emb.forward = gemma4_rotary(model.config)
    else:
        model.model.rotary_emb.forward = rotary(model.config.rope_parameters.get("rope_theta", 1.0))
    return model.double()
