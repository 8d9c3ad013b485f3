"""Problems with known answers under several search strategies; short right answers to the bare question are learnt."""

__all__: list[str] = []
