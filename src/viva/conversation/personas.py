"""Personas: texts by agent id, and the sentences that introduce one."""

AGENT_SYSTEM_PROMPTS: dict[int, str] = {
    0: "the Innovator: find a fresh way to the solution.",
    1: "the Critic: check every step and be exact.",
    2: "the Synthesizer: join the best parts of all solutions.",
}
"""Personas by agent id. Edit or pass your own; agents beyond the list get a numbered variant: `persona`."""


def persona(agent_id: int, personas: dict[int, str] | None = None) -> str:
    """Persona text of an agent.

    Agents beyond the listed personas take them again in turn, marked with a number, so that no two agents
    of a conversation ever read the same text.

    Raises:
        ValueError: If there are no personas, or their ids do not run from 0 upwards.
    """
    table = AGENT_SYSTEM_PROMPTS if personas is None else personas
    if not table or sorted(table) != list(range(len(table))):
        raise ValueError(
            f"personas must have the ids 0, 1, 2, ... without gaps; got {sorted(table)}. "
            "Give at least one persona and number them from 0."
        )
    text = table[agent_id % len(table)]
    variant = agent_id // len(table)
    if variant == 0:
        return text
    return f"{text} You are number {variant + 1} in this role: take another way than your namesake."


def introduction(persona_text: str, agent_id: int | None = None) -> str:
    """Sentences that tell an agent who it is.

    A persona that begins with a small letter, like ``the Critic: be exact.``, stands behind "You are"; any other, like
    ``You are a domain expert.``, is a sentence of its own.

    ``agent_id`` is the number by which the others know the agent, if they do.
    """
    text = persona_text.strip()
    if not text:
        return "" if agent_id is None else f"You are agent {agent_id}."
    if not text.endswith((".", "!", "?", ":", ";")):
        text += "."
    is_sentence = not text[0].islower() or text.lower().startswith(("you ", "you're "))
    if is_sentence:
        text = text[0].upper() + text[1:]
    if agent_id is None:
        return text if is_sentence else f"You are {text}"
    return f"You are agent {agent_id}{'.' if is_sentence else ','} {text}"
