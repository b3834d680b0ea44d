"""Operations on one number after another."""
